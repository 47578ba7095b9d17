"""Gates: what must hold before an artifact counts, each a number that is compared with a threshold."""
