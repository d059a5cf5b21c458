"""What hosts know of each other: records in a folder that all of them share, and their network."""
