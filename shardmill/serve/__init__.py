"""A built model behind OpenAI's HTTP interface: one resident engine, one worker thread, a bounded queue."""
