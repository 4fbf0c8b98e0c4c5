"""How far what `er.plan` predicts is from what is measured."""
