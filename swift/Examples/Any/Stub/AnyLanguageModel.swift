// Declarations of AnyLanguageModel (huggingface/AnyLanguageModel@f22b78e, LanguageModel.swift, LanguageModelSession.swift,
// Generable.swift and Transcript.swift), as far as ShardmillAny uses them: it type-checks where no package is fetched.
// No body may ever run.

public struct GeneratedContent: Sendable {
    public init(_ value: some ConvertibleToGeneratedContent) { fatalError() }
}

public protocol ConvertibleFromGeneratedContent: Sendable { init(_ content: GeneratedContent) throws }
public protocol ConvertibleToGeneratedContent: Sendable { var generatedContent: GeneratedContent { get } }
public protocol Generable: ConvertibleFromGeneratedContent, ConvertibleToGeneratedContent {
    associatedtype PartiallyGenerated: ConvertibleFromGeneratedContent = Self
}

extension Generable {
    public func asPartiallyGenerated() -> Self.PartiallyGenerated { fatalError() }
}

extension String: Generable {
    public init(_ content: GeneratedContent) throws { fatalError() }
    public var generatedContent: GeneratedContent { fatalError() }
}

public struct Prompt: Sendable {}
public struct GenerationOptions: Sendable {
    public var temperature: Double?
    public var maximumResponseTokens: Int?
}

public protocol Tool: Sendable {}

public struct Transcript: Sendable, RandomAccessCollection {
    public struct TextSegment: Sendable { public var content: String { fatalError() } }
    public struct ImageSegment: Sendable {}
    public enum Segment: Sendable {
        case text(TextSegment)
        case image(ImageSegment)
    }
    public struct Instructions: Sendable { public var segments: [Segment] { fatalError() } }
    public struct Prompt: Sendable { public var segments: [Segment] { fatalError() } }
    public struct Response: Sendable { public var segments: [Segment] { fatalError() } }
    public struct ToolCalls: Sendable {}
    public enum Entry: Sendable {
        case instructions(Instructions)
        case prompt(Prompt)
        case toolCalls(ToolCalls)
        case response(Response)
    }
    public var startIndex: Int { fatalError() }
    public var endIndex: Int { fatalError() }
    public subscript(index: Int) -> Entry { fatalError() }
}

public final class LanguageModelSession: @unchecked Sendable {
    public let tools: [any Tool] = []
    public var transcript: Transcript { fatalError() }

    public struct Response<Content>: Sendable where Content: Generable, Content: Sendable {
        public init(content: Content, rawContent: GeneratedContent, transcriptEntries: ArraySlice<Transcript.Entry>) {
            fatalError()
        }
    }

    public struct ResponseStream<Content>: Sendable where Content: Generable, Content.PartiallyGenerated: Sendable {
        public init(stream: AsyncThrowingStream<Snapshot, any Error>) { fatalError() }

        public struct Snapshot: Sendable where Content.PartiallyGenerated: Sendable {
            public init(content: Content.PartiallyGenerated, rawContent: GeneratedContent) { fatalError() }
        }
    }
}

public enum Availability<Reason>: Sendable where Reason: Sendable { case available }

public protocol LanguageModel: Sendable {
    associatedtype UnavailableReason: Sendable
    var availability: Availability<UnavailableReason> { get }
    func prewarm(for session: LanguageModelSession, promptPrefix: Prompt?)
    func respond<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type,
        includeSchemaInPrompt: Bool, options: GenerationOptions
    ) async throws -> LanguageModelSession.Response<Content> where Content: Generable
    func streamResponse<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type,
        includeSchemaInPrompt: Bool, options: GenerationOptions
    ) -> sending LanguageModelSession.ResponseStream<Content> where Content: Generable
}

extension LanguageModel where UnavailableReason == Never {
    public var availability: Availability<UnavailableReason> { .available }
}
