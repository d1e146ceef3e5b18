"""Ways to run the application and what stands around it."""
