// Declarations of Apple's FoundationModels of version 27, as far as this package uses it; see Stubs/CoreML/CoreML.swift.

public struct Transcript: Sendable, RandomAccessCollection {
    public enum Entry: Sendable {
        case instructions(Transcript.Instructions)
        case prompt(Transcript.Prompt)
        case response(Transcript.Response)
        case toolCalls(Transcript.ToolCalls)
    }

    public enum Segment: Sendable {
        case text(Transcript.TextSegment)
        case structure(Transcript.StructuredSegment)
    }

    public struct TextSegment: Sendable {
        public var content: String { get { fatalError() } set { fatalError() } }
    }

    public struct Instructions: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct Prompt: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct Response: Sendable {
        public var segments: [Transcript.Segment] { get { fatalError() } set { fatalError() } }
    }

    public struct StructuredSegment: Sendable {}
    public struct ToolCalls: Sendable {}

    public var startIndex: Int { fatalError() }
    public var endIndex: Int { fatalError() }
    public subscript(index: Int) -> Transcript.Entry { fatalError() }
}

public struct GenerationOptions: Sendable {
    public var temperature: Double? { get { fatalError() } set { fatalError() } }
    public var maximumResponseTokens: Int? { get { fatalError() } set { fatalError() } }
}

public struct LanguageModelCapabilities: Sendable {
    public struct Capability: Sendable {}
    public init(_ capabilities: [LanguageModelCapabilities.Capability]) { fatalError() }
}

public struct LanguageModelExecutorGenerationRequest: Sendable {
    public var transcript: Transcript { get { fatalError() } set { fatalError() } }
    public var generationOptions: GenerationOptions { get { fatalError() } set { fatalError() } }
}

public struct LanguageModelExecutorGenerationChannel: Sendable {
    public struct Event: Sendable {
        public static func response(entryID: String? = nil, action: LanguageModelExecutorGenerationChannel.Response.Action) -> LanguageModelExecutorGenerationChannel.Event { fatalError() }
    }

    public struct Response: Sendable {
        public struct Action: Sendable {
            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> LanguageModelExecutorGenerationChannel.Response.Action { fatalError() }
        }
    }

    public func send(_ event: LanguageModelExecutorGenerationChannel.Event) async { fatalError() }
}

public protocol LanguageModel: Sendable {
    associatedtype Executor: LanguageModelExecutor where Self == Self.Executor.Model
    var capabilities: LanguageModelCapabilities { get }
    var executorConfiguration: Self.Executor.Configuration { get }
}

public protocol LanguageModelExecutor: Sendable {
    associatedtype Configuration: Hashable, Sendable
    associatedtype Model: LanguageModel
    init(configuration: Self.Configuration) throws
    func prewarm(model: Self.Model, transcript: Transcript)
    func respond(to request: LanguageModelExecutorGenerationRequest, model: Self.Model, streamingInto channel: LanguageModelExecutorGenerationChannel) async throws
}
