"""Chat templates: rendered safely, and described for runtimes that have no Jinja."""
