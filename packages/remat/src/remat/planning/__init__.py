"""From a captured graph and a budget to a plan that was run once: cut, solved, measured."""
