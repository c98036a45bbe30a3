"""Data connections of our own, whatever carries them: their frames, their coming and going, one mover thread a side."""
