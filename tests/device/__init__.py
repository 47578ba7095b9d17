"""Tests of what goes out to a device and of what comes back."""
