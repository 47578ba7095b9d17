import Foundation
import ShardmillDecode
import Synchronization

/// A text as it comes, in whole characters. If its reader stops, the generation ends; if its task is cancelled, reading
/// throws a `CancellationError` too.
public typealias TextPieces = Streamed<String>

/// A message of a conversation.
public struct Message: Codable, Identifiable, Equatable, Sendable {
    /// Who says it.
    public enum Role: String, Codable, Sendable {
        /// The app's instructions.
        case system
        /// The user.
        case user
        /// The model.
        case assistant
    }

    /// What tells it from others with the same words.
    public let id: UUID
    /// Who says it.
    public let role: Role
    /// The text, of an answer without the thought before it.
    public let content: String
    /// What the model thought before the answer; nil if it did not. Formats of conversations leave it out.
    public let thought: String?

    /// The calls of functions in an answer that the model wrote in JSON between `<tool_call>` marks.
    public var calls: [FunctionCall] { role == .assistant ? FunctionCall.read(content).calls : [] }

    /// Make a message.
    public init(_ role: Role, _ content: String, thought: String? = nil, id: UUID = UUID()) {
        self.role = role
        self.content = content
        self.thought = thought
        self.id = id
    }

    /// Return whether two messages have the same words.
    public static func == (a: Message, b: Message) -> Bool {
        (a.role, a.content) == (b.role, b.content) && a.thought == b.thought
    }
}

/// One conversation with a model. Its tokens stay in the cache between turns, so that a turn only feeds what is new.
public actor Chat {
    nonisolated private let model: ShardmillModel
    /// The conversation so far.
    public private(set) var messages: [Message]
    /// How the last answer ended, and what it took.
    public private(set) var last: GenerationSummary?
    private let line = Line()

    init(_ model: ShardmillModel, _ messages: [Message]) {
        self.model = model
        self.messages = messages
    }

    /// Whether a message is being answered, or waits.
    nonisolated public var isResponding: Bool { !line.isEmpty }

    /// Answer a message, and yield the answer piece by piece in whole characters, without the thought before it and
    /// without calls of functions.
    ///
    /// To cancel, cancel the task that reads the stream, or stop reading: the generation ends after a pass, and the
    /// conversation goes on from before the message. A message that comes during an answer waits for the answer's end;
    /// messages are answered in the order in which their streams were made.
    nonisolated public func stream(_ text: String, options: ShardmillOptions = .init()) -> TextPieces {
        let place = line.join()
        return streaming { emit in
            try await self.answer(text, options, place) { if case .text(let text) = $0 { emit(text) } }
        }
    }

    /// Answer a message, and yield the thought before the answer too, and calls of functions.
    nonisolated public func pieces(_ text: String, options: ShardmillOptions = .init()) -> Streamed<AnswerPiece> {
        let place = line.join()
        return streaming { emit in try await self.answer(text, options, place, emit: emit) }
    }

    /// Answer a message and return the whole answer, without the thought before it. Calls of functions stay in the text.
    nonisolated public func respond(to text: String, options: ShardmillOptions = .init()) async throws -> String {
        try await answer(text, options, line.join()) { _ in }
    }

    /// Forget everything but the instructions, after the answers that were asked for before.
    public func clear() async throws {
        let place = line.join()
        defer { line.leave(place) }
        try await line.turn(place)
        messages = messages.filter { $0.role == .system }
        last = nil
    }

    /// Return how many tokens the conversation takes, with a message more if one is given.
    ///
    /// With the tokens of the answer it must not be more than `manifest.context`, unless the model was opened with a
    /// context that slides.
    public func tokenCount(adding text: String? = nil) throws -> Int {
        if let text { return try model.prompt(messages + [Message(.user, text)]).tokens.count }
        guard let asked = messages.last, asked.role == .assistant else { return 0 }
        return try model.prompt(Array(messages.dropLast())).tokens.count
            + model.codec.encode(asked.content, addSpecialTokens: false).count
    }

    @discardableResult
    private func answer(
        _ text: String, _ options: ShardmillOptions, _ place: Int, emit: @escaping @Sendable (AnswerPiece) -> Void
    ) async throws -> String {
        defer { line.leave(place) }
        try await line.turn(place)
        let asked = messages + [Message(.user, text)]
        let (summary, said) = try await model.answer(asked, options, for: ObjectIdentifier(self)) { piece, _ in
            emit(piece)
        }
        last = summary
        messages = asked + [said]
        return said.content
    }

    deinit { model.forget(ObjectIdentifier(self)) }
}

/// An answer that is split as it comes, on the model's thread, and read after its end.
private final class Answer: @unchecked Sendable {
    private var reader: AnswerReader
    private let emit: @Sendable (AnswerPiece, Int) -> Void
    private var (thought, text, tokens) = ("", "", 0)

    init(_ reader: AnswerReader, _ emit: @escaping @Sendable (AnswerPiece, Int) -> Void) {
        (self.reader, self.emit) = (reader, emit)
    }

    /// Split a text that some tokens have made; the first piece that becomes certain counts for all tokens since the last.
    func add(_ next: String, tokens more: Int, ended: Bool = false) {
        tokens += more
        for piece in reader.push(next, ended: ended) {
            switch piece {
            case .thought(let more): thought += more
            case .text(let more), .call(let more): text += more
            }
            emit(piece, tokens)
            tokens = 0
        }
    }

    var message: Message { Message(.assistant, text, thought: thought.isEmpty ? nil : thought) }
}

extension ShardmillModel {
    /// Begin a conversation.
    ///
    /// - Parameter instructions: the system's message; none if empty.
    nonisolated public func chat(instructions: String = "") -> Chat {
        Chat(self, instructions.isEmpty ? [] : [Message(.system, instructions)])
    }

    /// Go on with a conversation that the app has kept, such as `await chat.messages` of another start.
    nonisolated public func chat(history: [Message]) -> Chat { Chat(self, history) }

    /// Continue a text, and yield the continuation piece by piece.
    nonisolated public func complete(_ text: String, options: ShardmillOptions = .init()) -> TextPieces {
        streaming { emit in
            let prompt = try self.codec.encode(text, addSpecialTokens: true)
            _ = try await self.generate(prompt, options, stop: []) { emit($0.text) }
        }
    }

    /// Continue tokens, and yield the continuation piece by piece: for a conversation in a format of the caller's own.
    ///
    /// - Parameters:
    ///   - tokens: the whole prompt.
    ///   - stop: tokens that end the continuation, beside those of model.json.
    ///   - options: how much to generate, and how.
    nonisolated public func complete(
        _ tokens: [Int], stop: Set<Int> = [], options: ShardmillOptions = .init()
    ) -> TextPieces {
        streaming { emit in _ = try await self.generate(tokens, options, stop: stop) { emit($0.text) } }
    }

    /// Answer a conversation that the caller keeps, and yield the answer piece by piece, without the thought before it.
    nonisolated public func answer(to messages: [Message], options: ShardmillOptions = .init()) -> TextPieces {
        streaming { emit in
            _ = try await self.answer(messages, options) { piece, _ in if case .text(let text) = piece { emit(text) } }
        }
    }

    /// Answer a conversation that the caller keeps; return how the answer ended, and the answer.
    ///
    /// - Parameters:
    ///   - messages: the conversation.
    ///   - options: how much to generate, and how.
    ///   - owner: whose slots are used; nil for those of everybody else.
    ///   - emit: called with each piece and its number of tokens.
    func answer(
        _ messages: [Message], _ options: ShardmillOptions, for owner: ObjectIdentifier? = nil,
        emit: @escaping @Sendable (AnswerPiece, Int) -> Void
    ) async throws -> (GenerationSummary, Message) {
        let (prompt, opened) = try prompt(messages)
        let answer = Answer(AnswerReader(manifest.chat, opened: opened), emit)
        let summary = try await generate(prompt, options, stop: Set(manifest.chat?.stop ?? []), for: owner) { piece in
            answer.add(piece.text, tokens: piece.tokens)
        }
        answer.add("", tokens: 0, ended: true)
        return (summary, answer.message)
    }

    /// Return the tokens of a conversation, up to where the answer begins, and whether that is in a thought.
    ///
    /// - Throws: `ShardmillError` if the build has no chat format, or the format does not fit the conversation.
    nonisolated func prompt(_ messages: [Message]) throws -> (tokens: [Int], opened: Bool) {
        guard let format = manifest.chat else {
            throw ShardmillError(
                .request, "\(manifest.model) has no chat format that this package can apply: use complete()")
        }
        let text = try format.text(
            of: messages.map { (ChatFormat.Role(rawValue: $0.role.rawValue) ?? .user, $0.content) })
        return (try codec.encode(text, addSpecialTokens: false), format.thoughts?.isOpened(by: text) ?? false)
    }
}
