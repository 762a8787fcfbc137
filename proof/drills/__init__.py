"""Drills on the local cluster: faults and changes under steady traffic, the words that pdpool gives, what is lost."""
