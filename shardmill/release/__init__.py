"""The release of a build: signing, publishing, pulling, verifying, and rebuilding by others."""
