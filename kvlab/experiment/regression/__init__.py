"""`kvlab check`: did a policy hurt?"""
