"""Gates: what must hold before an artifact counts, each a number beside its threshold."""
