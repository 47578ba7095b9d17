"""Numbers of the placement rules that a plan must know, too. Nothing is imported here."""

MAX_EXTENT = 65536
STATE_WIDTH_MULTIPLE = 32
MAX_OUTPUT_CHANNELS = 16384  # of one projection, by the strictest report
MAX_WEIGHT_BYTES = 1 << 31  # of one weight file
MIN_WEIGHT_BYTES = 14_000_000  # with fewer, a program does not earn its dispatch
