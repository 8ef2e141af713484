"""A results file -> analysis -> terminal tables and plots. Measures nothing; needs neither torch nor pytest."""
