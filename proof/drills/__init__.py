"""Drills on the local cluster: faults and changes under steady traffic, and the words that pdpool gives, and what is lost."""
