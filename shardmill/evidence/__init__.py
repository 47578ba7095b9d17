"""Measurements of a build on devices: files in its folder `evidence`, which are read and never changed.

A file is an unchanged result of a kit (`kit/kit_runner`), sealed by its own digest. It counts for a build if the
packages that it names equal the build's packages, byte for byte.
"""
