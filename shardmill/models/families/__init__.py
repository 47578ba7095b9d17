"""One file for each `model_type` of Hugging Face; docs/families.md says how to add one."""
