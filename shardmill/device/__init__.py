"""What a device wants: builds go out as a kit, and what was measured of them comes back as evidence."""
