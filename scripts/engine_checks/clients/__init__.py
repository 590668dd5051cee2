"""Programs that run inside an engine's environment, one checkpoint a process. None imports k2convert."""
