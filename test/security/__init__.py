"""Security (I12): who proves the fleet key to whom, what strangers may do and see, and what hostile bodies end in."""

KEY = "a key of sixteen characters or more"
OTHER_KEY = "another key, of another fleet"
