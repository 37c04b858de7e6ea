"""Agent loops written for verl: the classes that they import, and the adapter that runs them."""
