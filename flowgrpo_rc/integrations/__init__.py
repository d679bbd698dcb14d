"""Drop-ins for other projects. Importing this package imports none of them."""
