"""What does a training step cost, beside stock transformers and PEFT, one process, and DTensor?"""
