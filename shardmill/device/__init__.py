"""Measuring on devices: builds go out as a kit, and their results come back as evidence."""
