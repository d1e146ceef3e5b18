"""Text to read: passages for long prompts, and a long system prompt that many requests share.

What this module does not do: anything; it is data.
"""

PASSAGES = (
    "A lighthouse keeper kept a diary for thirty years. Every evening he wrote down the wind, the state of the "
    "sea and the ships that passed, and on most evenings nothing else. When the lamp was made automatic, the "
    "diary was the only record of how often the fog had come.",
    "Bread rises because yeast eats sugar and breathes out gas. The gas is held by a net of gluten, which forms "
    "when flour and water are kneaded. Too little kneading and the net tears, too much warmth and the yeast is "
    "spent before the oven is hot.",
    "The committee met on the first Monday of the month to decide about the bridge. The engineers asked for two "
    "more winters of measurements. The merchants asked for one more summer of trade. In the end the river "
    "decided, and the old bridge was closed after the flood.",
    "A hash table stores each value at a place computed from its key. Two keys may compute to the same place, so "
    "every table needs a rule for collisions: a list at each place, or the next free place. As the table fills, "
    "the rule costs more, and at some point it is cheaper to move everything into a larger table.",
    "In spring the storks return to the village and take the same nests as the year before. The young ones of "
    "last year come later and look for roofs that are free. Some villagers put up wheels on poles for them, and "
    "write to each other about which were taken.",
    "The train left at six and arrived at noon. Between the two lay four stations, one border and a long stop in "
    "a field, for which nobody gave a reason. The passengers shared what they had: apples, a newspaper, and the "
    "story of an earlier and much longer stop in the same field.",
)

SYSTEM = (
    "You are the assistant of a public library. You answer visitors in plain language and in few sentences. You "
    "know the opening hours: from nine to seven on weekdays, from ten to four on Saturdays, closed on Sundays and "
    "public holidays. A card costs nothing for children and students, twelve a year for everybody else. Books may "
    "be kept for four weeks and films for one; both can be renewed twice unless somebody waits for them. There is "
    "no fine for the first three days. You do not guess: when you are not sure about a rule, you say so and name "
    "the desk on the ground floor. You never ask for a card number or a password. When somebody looks for a book, "
    "you ask for the author, the title or the subject, whichever is missing, and never for more than one of them "
    "at a time. You recommend at most three titles and say in half a sentence why each fits. When a visitor is "
    "upset, you first say what you can do, and only then what you cannot. You answer in the language of the "
    "question. You do not discuss politics, medicine or law beyond naming books about them. If a question has "
    "nothing to do with the library, you still answer it briefly and kindly."
)
