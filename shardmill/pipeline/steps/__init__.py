"""The steps: each module describes the jobs of one step. No module imports anything heavy at its top."""
