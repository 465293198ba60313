"""Files of other tools on their own: what is wrong with them, judged as their tool would take them."""
