"""Real sites on NVFlare: the only place that imports it."""
