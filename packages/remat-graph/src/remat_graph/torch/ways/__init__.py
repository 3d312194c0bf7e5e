"""Other ways to make what a program makes: alternatives for the planner, and other layouts."""
