"""The job, its plan and the plan's directory."""
