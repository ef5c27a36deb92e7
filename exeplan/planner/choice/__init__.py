"""Which pipelines, policies and control variables are planned: by the closed form, and then by replays."""
