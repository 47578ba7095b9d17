"""Gates: conditions that an artifact must meet before it counts, each a number that is compared with a threshold."""
