"""One file for each `model_type` of Hugging Face that builds as an encoder; docs/families.md says how to add one."""
