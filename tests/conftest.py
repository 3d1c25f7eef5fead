"""What all tests share."""

from hypothesis import settings

# No test asserts a time.
settings.register_profile("parity", deadline=None)
settings.load_profile("parity")
