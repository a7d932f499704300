"""The built-in vision-language model from scratch: pictures, questions, training, accuracy (`tools.train_demo_vlm`)."""
