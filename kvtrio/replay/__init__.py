"""Traffic without its words: recorded, made, played again, and looked into."""
