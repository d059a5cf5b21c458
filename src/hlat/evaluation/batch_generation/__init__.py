"""Generation of many texts: common prefixes computed once, several texts in one forward pass."""
