"""What a job will do, decided from headers: the recipe, the plan, the exclude list, and what `inspect` shows."""
