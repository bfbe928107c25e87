"""Workers in virtual time, made of the production cores."""
