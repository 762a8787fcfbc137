"""What every test shares: property tests draw the same examples in every run, and a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("pdpool", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pdpool")
