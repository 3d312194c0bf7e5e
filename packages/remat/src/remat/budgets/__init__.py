"""What a user may write as a budget, how many bytes it is, and what plain training would take."""
