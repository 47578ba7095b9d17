/// Proposed next tokens, and for each an estimate of the probability that it is right if the tokens before it are.
package struct Draft: Equatable, Sendable {
    /// The tokens, in order.
    package var tokens: [Int] = []
    /// For each token, the estimate.
    package var confidence: [Double] = []

    /// Make a draft; an empty one proposes nothing.
    package init(tokens: [Int] = [], confidence: [Double] = []) {
        self.tokens = tokens
        self.confidence = confidence
    }

    func first(_ count: Int) -> Draft {
        Draft(tokens: Array(tokens.prefix(count)), confidence: Array(confidence.prefix(count)))
    }
}

/// A source of guesses for the model's next tokens. It only affects speed, never which tokens come out.
package protocol Drafter: AnyObject {
    /// Start a request.
    func reset(_ prompt: [Int]) throws
    /// Propose at most `limit` tokens to follow the text: the prompt and all emitted tokens.
    func propose(_ limit: Int) throws -> Draft
    /// Record the tokens that the last pass emitted.
    func observe(_ emitted: [Int]) throws
}

/// Prompt-lookup decoding: the continuation of the last earlier occurrence of the text's end.
///
/// The longest known suffix wins, and among its earlier occurrences the most recent. Each drafted token is looked up
/// separately, as if the drafts before it were text.
package final class NgramDrafter: Drafter {
    private static let confidence = [0.2, 0.4, 0.55, 0.65]  // by length of the match
    private let longest = 4
    private var text: [Int] = []
    private var next: [ArraySlice<Int>: Int] = [:]

    /// Make a drafter that knows no text yet.
    package init() {}

    package func reset(_ prompt: [Int]) {
        text = []
        next = [:]
        observe(prompt)
    }

    package func propose(_ limit: Int) -> Draft {
        var tail = Array(text.suffix(longest))
        var draft = Draft()
        while draft.tokens.count < limit, let (token, order) = lookUp(tail) {
            draft.tokens.append(token)
            draft.confidence.append(Self.confidence[order - 1])
            tail.append(token)
        }
        return draft
    }

    package func observe(_ emitted: [Int]) {
        for token in emitted {
            let tail = text.suffix(longest)
            for order in 1..<tail.count + 1 { next[ArraySlice(Array(tail.suffix(order)))] = token }
            text.append(token)
        }
    }

    /// Return the follower of the longest known suffix of `tail`, and the suffix's length.
    private func lookUp(_ tail: [Int]) -> (Int, Int)? {
        for order in stride(from: min(longest, tail.count), to: 0, by: -1) {
            if let token = next[ArraySlice(Array(tail.suffix(order)))] { return (token, order) }
        }
        return nil
    }
}

/// Drafts from a suffix automaton of the text: the longest suffix, of any length, that occurred before, and its most
/// frequent continuation, among equals the latest.
///
/// Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; used for drafting by Hu et al.,
/// "SAM Decoding", 2024.
package final class SuffixDrafter: Drafter {
    private struct State {
        var next: [Int: Int] = [:]
        var link = -1
        var length = 0
        var best = -1
        var counts: [Int: Int] = [:]
    }

    /// Contexts, longest first, in which a token updates the counts; this bounds the cost of a token.
    private static let counted = 6
    private var states = [State()]
    private var last = 0

    /// Make a drafter that knows no text yet.
    package init() {}

    package func reset(_ prompt: [Int]) {
        states = [State()]
        last = 0
        observe(prompt)
    }

    package func observe(_ emitted: [Int]) {
        for token in emitted { extend(token) }
    }

    package func propose(_ limit: Int) -> Draft {
        var state = max(states[last].link, 0)  // the longest suffix of the text that also occurred earlier
        var length = states[state].length
        var draft = Draft()
        while draft.tokens.count < limit {
            while state > 0 && states[state].best < 0 {  // a context that occurred only at the end of the text
                state = states[state].link
                length = states[state].length
            }
            let token = states[state].best
            if token < 0 { break }
            draft.tokens.append(token)
            draft.confidence.append(share(state) * Double(length) / (Double(length) + 1.5))
            state = states[state].next[token]!
            length += 1
        }
        return draft
    }

    /// Return the share of the best continuation among a state's continuations; an uncounted one counts once.
    private func share(_ state: Int) -> Double {
        let counts = states[state].counts
        let total = counts.values.reduce(0, +) + states[state].next.count - counts.count
        return Double(counts[states[state].best] ?? 1) / Double(total)
    }

    private func extend(_ token: Int) {
        count(token)
        let state = newState(State(length: states[last].length + 1))
        var p = last
        while p >= 0 && states[p].next[token] == nil {
            connect(p, token, state)
            p = states[p].link
        }
        states[state].link = context(p, token)
        last = state
    }

    /// Return the state of the longest known context that ends in `token`; it is split off if necessary.
    private func context(_ from: Int, _ token: Int) -> Int {
        if from < 0 { return 0 }
        let q = states[from].next[token]!
        if states[q].length == states[from].length + 1 { return q }
        var split = states[q]
        split.length = states[from].length + 1
        let clone = newState(split)
        states[q].link = clone
        var p = from
        while p >= 0 && states[p].next[token] == q {
            states[p].next[token] = clone
            p = states[p].link
        }
        return clone
    }

    private func newState(_ state: State) -> Int {
        states.append(state)
        return states.count - 1
    }

    private func connect(_ state: Int, _ token: Int, _ target: Int) {
        states[state].next[token] = target
        if states[state].counts[states[state].best] ?? 1 <= 1 { states[state].best = token }
    }

    private func count(_ token: Int) {
        var state = states[last].link
        for _ in 0..<Self.counted {
            if state <= 0 { break }
            count(token, in: state)
            state = states[state].link
        }
        count(token, in: 0)
    }

    private func count(_ token: Int, in state: Int) {
        if states[state].next[token] == nil { return }  // its first time: the transition itself stands for it
        let times = (states[state].counts[token] ?? 1) + 1
        states[state].counts[token] = times
        if times >= states[state].counts[states[state].best] ?? 1 { states[state].best = token }
    }
}
