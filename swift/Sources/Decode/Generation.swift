/// How a request is decoded, apart from its prompt.
package struct Options: Sendable {
    /// The most tokens to generate.
    package var maxTokens: Int
    /// How tokens are chosen.
    package var sampling: Sampling
    /// Rows of a wider pass whose two best tokens are closer than this run again as a single token. For engines whose
    /// rows differ with the width of the pass; model.json's `margin` says by how much.
    package var guardMargin: Double

    /// Choose how much to generate, and how.
    package init(maxTokens: Int = 256, sampling: Sampling = Sampling(), guardMargin: Double = 0) {
        self.maxTokens = maxTokens
        self.sampling = sampling
        self.guardMargin = guardMargin
    }
}

/// Why a generation ended.
public enum FinishReason: String, Sendable {
    /// The model ended the text.
    case eos
    /// The most tokens that were asked for are generated.
    case length
    /// The context is full.
    case context
    /// The caller ended it, for example at a stop string.
    case stop
}

/// One emitted token.
package struct Token: Equatable, Sendable {
    /// The token's number.
    package let id: Int
    /// True if the drafter had proposed it.
    package let fromDraft: Bool
}

/// One request in progress: prefill, then pass after pass draft, verify, accept, until something ends it.
///
/// For any drafter, greedy tokens equal those of plain one-token decoding, and sampled tokens have the model's
/// distribution. A caller may stop at any token; the session then holds what the finished passes committed.
package final class Generation {
    /// The slots that the text lies in.
    package let session: Session
    /// Tokens of the prompt.
    package let promptTokens: Int
    /// Prompt tokens that were reused from the session.
    package private(set) var reusedTokens = 0
    /// Decode passes so far.
    package private(set) var passes = 0
    /// Drafted tokens that passes had so far.
    package private(set) var drafted = 0
    /// Drafted tokens that were right so far.
    package private(set) var accepted = 0
    /// Nil while the generation goes on.
    package private(set) var reason: FinishReason?

    private let options: Options
    private let drafter: (any Drafter)?
    private var lengths: DraftLength
    private var sampler: Sampler
    private var emitted: [Int] = []
    private var ready: [Token] = []
    private let clock = ContinuousClock()

    /// Prefill a prompt. The session may contain an earlier request: the prefix that both share is not run again.
    ///
    /// - Parameters:
    ///   - session: the slots for the text; no other generation may go on in them.
    ///   - prompt: the prompt's tokens.
    ///   - options: how much to generate, and how.
    ///   - drafter: where drafts come from; nil for none.
    ///   - progress: called after each pass with the prompt tokens in the slots; it may throw to stop.
    package init(
        _ session: Session, prompt: [Int], options: Options, drafter: (any Drafter)? = nil,
        progress: (Int) throws -> Void = { _ in }
    ) throws {
        if options.maxTokens < 1 {
            throw ShardmillError(.request, "maxTokens is \(options.maxTokens): it must be at least 1")
        }
        try options.sampling.check(vocab: session.engine.manifest.vocab)
        try session.check(prompt)
        self.session = session
        self.options = options
        self.drafter = drafter
        promptTokens = prompt.count
        lengths = DraftLength()
        sampler = Sampler(options.sampling, prompt: prompt, vocab: session.engine.manifest.vocab)
        let prefill = try session.prefill(prompt) { try progress($0.held) }
        reusedTokens = prefill.reused
        let first = try sampler.next(prefill.logits!, prefill.row)
        try drafter?.reset(prompt)
        try drafter?.observe([first])
        ready = [Token(id: first, fromDraft: false)]
    }

    /// Return the next token, or nil after the last one; `reason` then says why.
    package func next() throws -> Token? {
        if reason != nil { return nil }
        if ready.isEmpty { try decodePass() }
        let token = ready.removeFirst()
        emitted.append(token.id)
        if session.engine.manifest.eos.contains(token.id) {
            reason = .eos
        } else if emitted.count >= options.maxTokens {
            reason = .length
        } else if ready.isEmpty && session.room() == 0 {
            reason = .context
        }
        return token
    }

    /// End the generation before its next token, for example at a stop string.
    package func stop() { reason = reason ?? .stop }

    /// Feed the pending token and drafts, and keep the drafts that the model itself would have produced.
    private func decodePass() throws {
        let most = min(session.room(), options.maxTokens - emitted.count) - 1
        let asked = lengths.limit(most) { session.passWidth($0) }
        let begin = clock.now
        var draft = asked > 0 ? try drafter?.propose(asked) ?? Draft() : Draft()
        lengths.drafted(draft.tokens.count, seconds(clock.now - begin))
        let vocab = session.engine.manifest.vocab
        draft = draft.first(min(most, draft.tokens.firstIndex { !(0..<vocab).contains($0) } ?? draft.tokens.count))
        let proposed = draft
        draft = draft.first(lengths.choose(draft) { session.passWidth($0) })
        let start = clock.now
        var logits = try session.feed([emitted.last!] + draft.tokens)
        lengths.timed(session.passWidth(1 + draft.tokens.count), seconds(clock.now - start))

        var tokens: [Int] = []
        var right = 0
        for place in 0...draft.tokens.count {
            let isDraft = place < draft.tokens.count
            let token = try choose(
                &logits, place, drafted: isDraft ? draft.tokens[place] : nil, guarded: !draft.tokens.isEmpty)
            tokens.append(token)
            if !isDraft || token != draft.tokens[place] { break }
            right += 1
            if session.engine.manifest.eos.contains(token) { break }
        }
        session.commit(1 + right)
        try drafter?.observe(tokens)
        lengths.observe(
            proposed.first(tokens.count), accepted: zip(proposed.tokens, tokens).prefix { $0 == $1 }.count)
        passes += 1
        drafted += draft.tokens.count
        accepted += right
        ready = tokens.enumerated().map { Token(id: $1, fromDraft: $0 < right) }
    }

    private func choose(_ logits: inout Logits, _ place: Int, drafted: Int?, guarded: Bool) throws -> Int {
        if try guarded && options.guardMargin > 0 && sampler.margin(logits, place) < options.guardMargin {
            logits = try logits.copied()  // the next pass may end their validity
            let alone = try session.refeed(place)
            return try drafted.map { try sampler.check(alone, 0, drafted: $0) } ?? sampler.next(alone, 0)
        }
        return try drafted.map { try sampler.check(logits, place, drafted: $0) } ?? sampler.next(logits, place)
    }
}

private func seconds(_ duration: Duration) -> Double {
    Double(duration.components.seconds) + Double(duration.components.attoseconds) * 1e-18
}
