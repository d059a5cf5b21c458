"""Steps of first_contact.py, and what starts them. Modules that the driver imports need nothing but Python."""
