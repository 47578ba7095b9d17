/// What happens when the slots are used up.
public enum ContextPolicy: String, Sendable {
    /// Generation ends.
    case stop
    /// The oldest positions are evicted, except for the first few.
    case slide
}

/// A map from positions to slots.
struct SlotLayout {
    /// Positions that a sliding context never evicts.
    static let sinks = 4

    let slots: Int
    let sinks: Int
    /// Tokens of the widest decode pass.
    let lookahead: Int
    /// Positions that a sliding context evicts at a time; 0 if it does not slide.
    let block: Int

    init(_ policy: ContextPolicy, slots: Int, lookahead: Int) throws {
        self.slots = slots
        self.lookahead = lookahead
        switch policy {
        case .stop: (sinks, block) = (0, 0)
        case .slide:
            (sinks, block) = (Self.sinks, max(1, min(64, slots / 8)))
            if capacity < lookahead + 2 * block {
                throw ShardmillError(
                    .request,
                    "a context of \(slots) tokens is too small to slide with passes of \(lookahead): use .stop")
            }
        }
    }

    /// The number of slots in the ring.
    private var capacity: Int { slots - sinks }

    func slot(_ position: Int) -> Int {
        block == 0 || position < sinks ? position : sinks + (position - sinks) % capacity
    }

    /// Return the first position, other than the sinks, that a query at `position` sees.
    func firstVisible(_ position: Int) -> Int {
        if block == 0 { return 0 }
        let overwritten = position + lookahead - capacity  // every position below this may be overwritten
        return max(sinks, overwritten <= 0 ? sinks : (overwritten + block - 1) / block * block)
    }

    /// Return how many positions from `position` on have a slot; nil if unlimited.
    func room(_ position: Int) -> Int? { block == 0 ? max(0, slots - position) : nil }

    /// Return how many positions from `position` on can be written without overwriting one that `position` sees.
    func writable(_ position: Int) -> Int {
        block == 0 ? max(0, slots - position) : firstVisible(position) + capacity - position
    }

    /// Return how many positions from `position` on see the same first position; nil if all do.
    func sameWindow(_ position: Int) -> Int? {
        if block == 0 { return nil }
        return firstVisible(position) / block * block - lookahead + capacity - position + 1
    }
}

/// The progress of a prompt into the slots.
package struct Prefill {
    /// Logits after the prompt's last token; nil before that token has run.
    package let logits: Logits?
    /// The place of the last token's row in `logits`.
    package let row: Int
    /// Prompt tokens in the slots.
    package let held: Int
    /// How many of these tokens were reused from earlier requests.
    package let reused: Int
    /// Passes so far.
    package let passes: Int
    /// Tokens of the last pass, padding included.
    package let width: Int
}

/// One sequence in an engine's slots: its committed tokens, the next pass, and reuse by a new prompt.
///
/// Tokens are fed after the committed ones and count only after `commit` keeps them. Other fed tokens are hidden by
/// their position and overwritten by the next pass. A pass is padded to a width by its last token, in the slots that
/// follow.
package final class Session {
    /// The engine whose slots these are; nobody else may use it.
    package let engine: Engine
    /// Widths of decode passes, ascending.
    package let widths: [Int]
    /// The committed tokens.
    package private(set) var tokens: [Int] = []
    let contextPolicy: ContextPolicy
    private let layout: SlotLayout
    private var fed: [Int] = []
    private var first: Int
    /// The cost of a pass in tokens, added to its width, when a prompt is divided into passes.
    private static let passCost = 16.0

    /// Begin with empty slots.
    ///
    /// - Throws: `ShardmillError` if the context is too small to slide.
    package init(_ engine: Engine, contextPolicy: ContextPolicy = .stop) throws {
        self.engine = engine
        self.contextPolicy = contextPolicy
        widths = engine.manifest.widths.filter { $0 <= max(1, engine.manifest.verify) }
        layout = try SlotLayout(contextPolicy, slots: engine.manifest.context, lookahead: widths.last!)
        first = layout.firstVisible(0)
        _ = try engine.adapt(nil)
        try engine.reset()
    }

    /// Compute with an adapter of the build from now on, or with the bare model.
    ///
    /// If that changes the weights, the committed tokens are dropped: another model computed their keys and values. The
    /// weights also change if the adapter has been replaced in the build's folder.
    ///
    /// - Throws: `ShardmillError` if the build has no such adapter; the session then stays as it was.
    package func useAdapter(_ name: String?) throws {
        if try engine.adapt(name) { _ = try truncate(0) }
    }

    /// Return the most tokens that one `feed` may take; 0 when the context is full.
    package func room() -> Int {
        let writable = layout.writable(tokens.count)
        let widest = widths.last { $0 <= writable } ?? 0
        return layout.sameWindow(tokens.count).map { min(widest, $0) } ?? widest
    }

    /// Return whether a text of `count` tokens fits.
    func canHold(_ count: Int) -> Bool { layout.room(0).map { count <= $0 } ?? true }

    /// Return how many tokens may be committed from here on and still be dropped by `truncate`.
    func undoable() -> Int {
        let position = tokens.count
        let found = layout.sameWindow(position).map { min($0, widths.last!) } ?? layout.room(position) ?? 0
        return min(found, engine.undoable(position) ?? found)
    }

    /// Return the width of the pass that `feed` would use for `count` tokens.
    func passWidth(_ count: Int) -> Int { widths.first { $0 >= count }! }

    /// Throw for a prompt that `prefill` can't accept.
    package func check(_ prompt: [Int]) throws {
        if prompt.isEmpty { throw ShardmillError(.request, "the prompt is empty: give at least one token") }
        if let stray = prompt.first(where: { !(0..<engine.manifest.vocab).contains($0) }) {
            throw ShardmillError(
                .request,
                "the prompt holds token \(stray), the vocabulary has \(engine.manifest.vocab): is it another model's?")
        }
        if let room = layout.room(0), prompt.count > room {
            throw ShardmillError(
                .promptTooLong, "the prompt has \(prompt.count) tokens, the context \(room): shorten it")
        }
    }

    /// Make the committed tokens equal to a checked prompt, pass by pass, and run only the tokens after a shared
    /// prefix.
    ///
    /// - Parameters:
    ///   - prompt: the prompt's tokens.
    ///   - after: called after each pass; if it throws, finished passes stay committed.
    package func prefill(_ prompt: [Int], after: (Prefill) throws -> Void = { _ in }) throws -> Prefill {
        try check(prompt)
        let reused = try truncate(shared(prompt))
        try engine.fit(min(prompt.count + widths.last!, engine.manifest.context))
        var done = reused
        var passes = 0
        while true {
            let (count, width) = try promptPass(prompt.count - done)
            let next = Array(prompt[done..<done + count])
            done += count
            passes += 1
            let logits = done == prompt.count ? try rows(next, width) : nil
            if logits == nil { try write(next, width) }
            commit(count)
            let progress = Prefill(
                logits: logits, row: count - 1, held: done, reused: reused, passes: passes, width: width)
            try after(progress)
            if done == prompt.count { return progress }
        }
    }

    /// Run tokens after the committed ones and return their logits. Nothing is committed yet.
    package func feed(_ next: [Int]) throws -> Logits {
        if !(1...max(1, room())).contains(next.count) || room() == 0 {
            throw ShardmillError(.request, "\(next.count) tokens do not fit into a pass, \(room()) do")
        }
        return try rows(next, passWidth(next.count))
    }

    /// Run the `index`-th token of the last `feed` again, alone, and return its logits.
    package func refeed(_ index: Int) throws -> Logits {
        let position = tokens.count + index
        slide(position)
        return try finite(engine.forward([fed[index]], slots: [layout.slot(position)], positions: [position]), 1)
    }

    /// Keep the first `count` tokens of the last `feed`.
    package func commit(_ count: Int) {
        precondition((0...fed.count).contains(count))  // a mistake in this package, never in data
        tokens += fed[..<count]
        fed = []
    }

    /// Drop committed tokens from `length` on and return how many are kept.
    ///
    /// The result is `length`, or 0 if the engine no longer has the tokens that position `length` must see.
    package func truncate(_ length: Int) throws -> Int {
        let intact = layout.firstVisible(length) == first && (length == 0 || engine.rewindable(length))
        fed = []
        if !intact {
            tokens = []  // first: if the engine fails, nothing is believed to be in its slots
            try engine.reset()
            first = layout.firstVisible(0)
            return 0
        }
        tokens.removeSubrange(length...)
        return length
    }

    /// Return how many tokens of a prompt are committed already; the last one must run, since its logits are needed.
    private func shared(_ prompt: [Int]) -> Int {
        let limit = min(tokens.count, prompt.count - 1)
        return (0..<limit).first { tokens[$0] != prompt[$0] } ?? limit
    }

    /// Return how many of the `left` prompt tokens to feed next, and the width of the pass.
    ///
    /// The pass is the one that feeds the most tokens for its cost, which is not a measured time: so a prompt is
    /// divided alike in every run.
    private func promptPass(_ left: Int) throws -> (count: Int, width: Int) {
        let writable = layout.writable(tokens.count)
        let most = layout.sameWindow(tokens.count).map { min(left, $0) } ?? left
        func worth(_ width: Int) -> Double { Double(min(width, most)) / (Self.passCost + Double(width)) }
        var best: Int?
        for width in engine.manifest.widths where width <= writable {
            if best == nil || worth(width) >= worth(best!) { best = width }  // among equals the wider
        }
        guard let best else {
            throw ShardmillError(.promptTooLong, "\(left) tokens of the prompt are left, the context is full")
        }
        return (min(best, most), best)
    }

    private func rows(_ next: [Int], _ width: Int) throws -> Logits {
        let filled = padded(next, width)
        let (slots, positions) = places(filled.count)
        let logits = try engine.forward(filled, slots: slots, positions: positions)
        fed = next
        return try finite(logits, next.count)
    }

    /// Return the logits of a pass; if the model has computed what is no number, forget the text and throw.
    ///
    /// One logit of each of the `count` tokens tells: if a hidden state is not finite, neither is any of its logits.
    private func finite(_ logits: Logits, _ count: Int) throws -> Logits {
        if try logits.firsts(count).allSatisfy({ $0 < .infinity }) { return logits }  // not so if it is no number
        (tokens, fed) = ([], [])
        first = layout.firstVisible(0)
        try engine.renew()
        throw ShardmillError(.program, "the model has computed a number that is not finite, so the text can't go on")
    }

    private func write(_ next: [Int], _ width: Int) throws {
        let filled = padded(next, width)
        let (slots, positions) = places(filled.count)
        try engine.write(filled, slots: slots, positions: positions)
        fed = next
    }

    /// Fill a pass up by its last token. A pass of several blocks of a recurrence has only tokens that are kept; the
    /// program fills it up.
    private func padded(_ tokens: [Int], _ width: Int) -> [Int] {
        if width > widths.last! && engine.manifest.recurrence?.narrow != nil { return tokens }
        return tokens + [Int](repeating: tokens.last!, count: width - tokens.count)
    }

    private func places(_ width: Int) -> (slots: [Int], positions: [Int]) {
        slide(tokens.count)
        let positions = Array(tokens.count..<tokens.count + width)
        return (positions.map(layout.slot), positions)
    }

    /// Forget what a pass at `position` no longer sees.
    private func slide(_ position: Int) {
        let visible = layout.firstVisible(position)
        if visible > first {
            engine.forget((first..<visible).map(layout.slot))
            first = visible
        }
    }
}
