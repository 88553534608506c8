"""The pages: each a pure function from what is known to lines, none of which needs a terminal."""
