// Lucene Monitor on one set: MonitorPeer FILTERS DOCUMENTS SECONDS ANSWERS; prints one line of JSON.
//
// FILTERS has a query of Lucene's standard parser a line; DOCUMENTS a document a line, its fields as name=value separated
// by tabs (i_name: an integer, whose ranges are asked of pi_name). ANSWERS gets the line numbers of the filters that match, a document a line.

import java.io.PrintWriter;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.text.DecimalFormat;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.lucene.analysis.core.KeywordAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.IntPoint;
import org.apache.lucene.document.StringField;
import org.apache.lucene.monitor.Monitor;
import org.apache.lucene.monitor.MonitorQuery;
import org.apache.lucene.monitor.QueryMatch;
import org.apache.lucene.monitor.TermFilteredPresearcher;
import org.apache.lucene.queryparser.flexible.standard.StandardQueryParser;
import org.apache.lucene.queryparser.flexible.standard.config.PointsConfig;

public class MonitorPeer {
    static long cpu() {
        return ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime();
    }

    static Document document(String line) {
        Document document = new Document();
        for (String field : line.split("\t")) {
            int at = field.indexOf('=');
            String name = field.substring(0, at), value = field.substring(at + 1);
            document.add(new StringField(name, value, Field.Store.NO));
            // For ranges; equalities are terms, by which the presearcher finds queries.
            if (name.startsWith("i_")) document.add(new IntPoint("p" + name, Integer.parseInt(value)));
        }
        return document;
    }

    public static void main(String[] arguments) throws Exception {
        List<String> filters = Files.readAllLines(Path.of(arguments[0]));
        List<Document> documents = new ArrayList<>();
        Map<String, PointsConfig> points = new HashMap<>();
        for (String line : Files.readAllLines(Path.of(arguments[1]))) {
            documents.add(document(line));
            for (String field : line.split("\t"))
                if (field.startsWith("i_"))
                    points.put("p" + field.substring(0, field.indexOf('=')), new PointsConfig(new DecimalFormat("0"), Integer.class));
        }
        StandardQueryParser parser = new StandardQueryParser(new KeywordAnalyzer());
        parser.setPointsConfigMap(points);
        try (Monitor monitor = new Monitor(new KeywordAnalyzer(), new TermFilteredPresearcher()); PrintWriter answers = new PrintWriter(arguments[3])) {
            long started = cpu();
            List<MonitorQuery> batch = new ArrayList<>();
            for (int number = 0; number < filters.size(); number++) {
                batch.add(new MonitorQuery(Integer.toString(number), parser.parse(filters.get(number), "none")));
                if (batch.size() == 1000 || number == filters.size() - 1) {
                    monitor.register(batch);
                    batch.clear();
                }
            }
            double register = filters.size() / ((cpu() - started) / 1e9);
            double seconds = Double.parseDouble(arguments[2]), best = 0;
            boolean first = true;
            long end = System.nanoTime() + (long) (8e9 * seconds), busy = cpu();
            while (first || ((cpu() - busy) / 1e9 < seconds && System.nanoTime() < end)) {
                started = cpu();
                int calls = 0;
                for (Document document : documents) {
                    var found = monitor.match(document, QueryMatch.SIMPLE_MATCHER);
                    calls++;
                    if (!first) {
                        if (System.nanoTime() > end) break;
                        continue;
                    }
                    List<Integer> numbers = new ArrayList<>();
                    for (QueryMatch match : found.getMatches()) numbers.add(Integer.parseInt(match.getQueryId()));
                    numbers.sort(null);
                    StringBuilder line = new StringBuilder();
                    for (int number : numbers) line.append(line.length() > 0 ? " " : "").append(number);
                    answers.println(line);
                }
                best = Math.max(best, calls / ((cpu() - started) / 1e9));
                first = false;
            }
            System.out.println("{\"register\": " + register + ", \"objects\": " + best + "}");
        }
    }
}
