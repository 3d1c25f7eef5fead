"""Estimate what the best linear filter could see of the mistakes that parity does not detect."""
