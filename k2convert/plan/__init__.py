"""Plan of a job, decided from headers: the recipe, the plan, the exclude list, and what `inspect` shows."""
