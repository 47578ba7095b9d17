"""What devices said of a build: files in its folder `evidence`, read and never written to.

A file is a result of the lane (`shardmill/lane`) as it came, sealed by its own digest. It speaks for a build if the
packages that it names are the build's, byte for byte.
"""
