"""What the prefix cache gains and loses, recorded between steps and published by a thread of its own."""
