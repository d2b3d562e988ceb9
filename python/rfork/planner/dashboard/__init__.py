"""Static files of the dashboard: no build step, nothing fetched from elsewhere."""
