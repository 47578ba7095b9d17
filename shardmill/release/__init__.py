"""What a build becomes when it leaves the machine: signed, published, pulled, verified, built again by others."""
